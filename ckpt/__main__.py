"""``python -m ckpt``: the same as the ``ckpt`` command."""

from ckpt.cli.start import ckpt

if __name__ == "__main__":
    ckpt()
