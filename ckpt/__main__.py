"""``python -m ckpt``: the same as the ``ckpt`` command."""

from ckpt.cli.main import main

if __name__ == "__main__":
    main()
