"""Which optimizers can be replayed: those whose step of an element depends on that element's gradient and state alone.

Then it makes no difference how a tensor is cut, and a step is repeated from the gradient, bit by bit, by the same
kernel. LAMB and LARS scale by norms of whole tensors, Muon multiplies matrices, Adafactor keeps sums of rows, 8-bit
optimizers quantize in blocks that follow the cut.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from ckpt.engine.base import Stepped

ELEMENTWISE = frozenset({
    "torch.optim.adam.Adam", "torch.optim.adamw.AdamW", "torch.optim.adamax.Adamax", "torch.optim.nadam.NAdam",
    "torch.optim.radam.RAdam", "torch.optim.adagrad.Adagrad", "torch.optim.adadelta.Adadelta",
    "torch.optim.rmsprop.RMSprop", "torch.optim.rprop.Rprop", "torch.optim.asgd.ASGD", "torch.optim.sgd.SGD",
    "deepspeed.ops.adam.fused_adam.FusedAdam", "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam",
    "deepspeed.ops.lion.fused_lion.FusedLion", "deepspeed.ops.lion.cpu_lion.DeepSpeedCPULion",
    "deepspeed.ops.adagrad.cpu_adagrad.DeepSpeedCPUAdagrad",
})  # fmt: skip
"""Classes that were read: each computes element by element."""
_WHY = {
    "Lamb": "it scales each tensor's update by norms of the whole tensor",
    "LAMB": "it scales each tensor's update by norms of the whole tensor",
    "LARS": "it scales each tensor's update by norms of the whole tensor",
    "Muon": "it multiplies whole matrices",
    "Adafactor": "it keeps sums over rows and columns instead of one number an element",
    "8bit": "it quantizes its state in blocks that follow how tensors are cut",
    "LBFGS": "it evaluates the model several times a step",
    "SparseAdam": "its gradients are sparse",
}
_UNSAVED = ("Adafactor", "8bit", "LBFGS")
"""Optimizers whose state does not lie as the parameters do, so that it is not saved in full either."""
_KERNEL_SETTINGS = ("adam_w_mode", "fp32_optimizer_states")
_KERNEL_OPTIONS = ("foreach", "fused", "capturable", "amsgrad", "maximize", "decoupled_weight_decay")


def refuse_unsupported(stepped: list[Stepped]) -> list[Stepped]:
    """Return what is stepped, if all of it can be logged and replayed.

    Raises:
        ConfigError: an optimizer cannot, or a parameter is complex; says which and why, and whether
            ``gradients=False`` saves without a log.
    """
    for optimizer in dict.fromkeys(one.optimizer for one in stepped):
        kind = type(optimizer)
        name = f"{kind.__module__}.{kind.__qualname__}"
        if name not in ELEMENTWISE:
            why = next((text for word, text in _WHY.items() if word in name), "it is not known to work by element")
            unsaved = any(word in name for word in _UNSAVED)
            instead = "ckpt does not save its state either" if unsaved else "gradients=False saves without one"
            raise ConfigError(f"optimizer {name} cannot be replayed from a log of gradients: {why}; {instead}")
    for one in stepped:
        if one.key.is_complex():
            raise ConfigError(
                f"parameter {one.members[0]!r} is {one.key.dtype}: gradients of complex parameters are not logged; "
                f"gradients=False saves without a log"
            )
    if not stepped:
        raise ConfigError("this engine has no optimizer whose gradients could be logged; gradients=False saves without")
    return stepped


def kernel_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what decides which code computes a step: class and options, as plain values."""
    kind = type(optimizer)
    group = optimizer.param_groups[0] if optimizer.param_groups else {}
    options = {
        name: group[name] for name in _KERNEL_OPTIONS if isinstance(group.get(name), bool | None) and name in group
    }
    # Of DeepSpeed's optimizers: not in their groups.
    options |= {name: bool(getattr(optimizer, name)) for name in _KERNEL_SETTINGS if hasattr(optimizer, name)}
    return {"class": f"{kind.__module__}.{kind.__qualname__}", "options": options}
