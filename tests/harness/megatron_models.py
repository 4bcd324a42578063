"""Small Megatron-core GPT models that really train, on CPU, in any layout."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from tests.harness import megatron_shim

if TYPE_CHECKING:
    from collections.abc import Iterator

VOCABULARY, PADDED, SEQUENCE, GLOBAL_BATCH, MICRO_BATCHES = 100, 128, 16, 8, 2

Engine = tuple[list[Any], Any, Any]


def start(tp: int = 1, pp: int = 1, virtual: int | None = None, ep: int = 1) -> None:
    """Make the process groups; what is left of the world is data parallel."""
    from megatron.core import parallel_state

    megatron_shim.install()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=virtual,
        expert_model_parallel_size=ep,
        create_gloo_process_groups=False,
    )


def make_engine(
    seed: int = 0,
    dtype: str = "float32",
    distributed: bool = False,
    *,
    layers: int = 4,
    tied: bool = True,
    experts: int | None = None,
    overlap: bool = False,
    config: dict[str, Any] | None = None,
    scheduler: dict[str, Any] | None = None,
) -> Engine:
    """Return (chunks, optimizer, scheduler). Weights depend on the seed, not on the layout."""
    from megatron.core import parallel_state as ps
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(seed)
    low = dtype != "float32"
    kind = getattr(torch, dtype)
    virtual = ps.get_virtual_pipeline_model_parallel_world_size()
    common = TransformerConfig(
        num_layers=layers, hidden_size=32, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=48,
        gated_linear_unit=True, activation_func=F.silu, normalization="RMSNorm",
        tensor_model_parallel_size=ps.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=ps.get_pipeline_model_parallel_world_size(),
        virtual_pipeline_model_parallel_size=virtual,
        expert_model_parallel_size=ps.get_expert_model_parallel_world_size(), num_moe_experts=experts,
        use_cpu_initialization=True, attention_dropout=0.0, hidden_dropout=0.0, gradient_accumulation_fusion=False,
        masked_softmax_fusion=False, bias_activation_fusion=False, bias_dropout_fusion=False, params_dtype=kind,
        pipeline_dtype=kind, bf16=dtype == "bfloat16", fp16=dtype == "float16", batch_p2p_sync=False,
        **(config or {}),
    )  # fmt: skip
    sync = DistributedDataParallelConfig(
        use_distributed_optimizer=distributed,
        overlap_param_gather=overlap,
        overlap_grad_reduce=overlap,
        bucket_size=5000,
    )
    chunks = []
    for stage in range(virtual or 1):
        place = {"vp_stage": stage} if virtual else {}
        chunk: Any = GPTModel(
            config=common,
            transformer_layer_spec=get_gpt_layer_local_spec(num_experts=experts, normalization="RMSNorm"),
            vocab_size=PADDED,
            max_sequence_length=SEQUENCE,
            pre_process=ps.is_pipeline_first_stage(ignore_virtual=False, **place),
            post_process=ps.is_pipeline_last_stage(ignore_virtual=False, **place),
            share_embeddings_and_output_weights=tied,
            **place,
        )
        chunk = Float16Module(common, chunk) if low else chunk
        chunks.append(DistributedDataParallel(common, sync, chunk))
    options = OptimizerConfig(
        optimizer="adam", lr=1e-2, min_lr=1e-3, weight_decay=0.1, clip_grad=1.0, use_distributed_optimizer=distributed,
        bf16=dtype == "bfloat16", fp16=dtype == "float16", params_dtype=kind, initial_loss_scale=2.0**10,
        loss_scale_window=2, overlap_param_gather=overlap,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(options, chunks, use_gloo_process_groups=False)
    schedule = {
        "init_lr": 0.0, "max_lr": 1e-2, "min_lr": 1e-3, "lr_warmup_steps": 2, "lr_decay_steps": 20,
        "lr_decay_style": "cosine", "start_wd": 0.1, "end_wd": 0.2, "wd_incr_steps": 20, "wd_incr_style": "linear",
        **(scheduler or {}),
    }  # fmt: skip
    return chunks, optimizer, OptimizerParamScheduler(optimizer, **schedule)


def _batches(step: int, micro_batch: int) -> Iterator[dict[str, torch.Tensor]]:
    from megatron.core import parallel_state as ps

    tokens = torch.randint(0, VOCABULARY, (GLOBAL_BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(step))
    mine = tokens.chunk(ps.get_data_parallel_world_size())[ps.get_data_parallel_rank()]
    for part in mine.split(micro_batch):
        yield {"tokens": part[:, :-1], "labels": part[:, 1:].contiguous()}


def train(engine: Engine, steps: int, first: int = 0) -> list[float]:
    """Run optimizer steps; return the losses of the last stage (nothing on others)."""
    from megatron.core import parallel_state as ps
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    chunks, optimizer, scheduler = engine
    micro_batch = GLOBAL_BATCH // ps.get_data_parallel_world_size() // MICRO_BATCHES
    position = torch.arange(SEQUENCE)[None]
    mask = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool), 1)

    def forward(batches: Iterator[dict[str, torch.Tensor]], chunk: Any) -> Any:
        batch = next(batches)
        out = chunk(batch["tokens"], position.expand_as(batch["tokens"]), mask, labels=batch["labels"])
        return out, lambda o: (o.float().mean() * optimizer.get_loss_scale(), {"loss": o.detach().float().mean()})

    losses = []
    for step in range(first, first + steps):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        batches = [_batches(step, micro_batch) for _ in chunks]
        done = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=batches if len(chunks) > 1 else batches[0],
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=MICRO_BATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=micro_batch,
            forward_only=False,
        )
        finalize_model_grads(chunks)
        optimizer.step()
        scheduler.step(1)
        losses += [sum(one["loss"].item() for one in done) / len(done)] if done else []
    return losses


def snapshot(engine: Engine) -> dict[str, Any]:
    """Return digests and values of everything that training reads, taken from Megatron's objects by their own names."""
    chunks, optimizer, scheduler = engine
    found: dict[str, Any] = {}
    for i, chunk in enumerate(chunks):
        for name, tensor in chunk.module.named_parameters():
            found[f"{i} {name}"] = digest(tensor)
    for i, wrapper in enumerate(optimizer.chained_optimizers):
        for g, group in enumerate(wrapper.optimizer.param_groups):
            found[f"{i} group {g}"] = {k: repr(v) for k, v in sorted(group.items()) if k != "params"}
            for j, key in enumerate(group["params"]):
                found[f"{i} {g} {j}"] = digest(key)
                state = wrapper.optimizer.state.get(key, {})
                found |= {f"{i} {g} {j} {k}": digest(torch.as_tensor(v)) for k, v in state.items()}
        scaler = getattr(wrapper, "grad_scaler", None)
        found[f"{i} scaler"] = repr(scaler.state_dict()) if scaler else None
    return {**found, "scheduler": scheduler.state_dict()}


def digest(tensor: torch.Tensor) -> str:
    """Return a digest of values, dtype and shape."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(data).hexdigest()[:16]}"
