"""The benchmark: ``python -m fastconvt.bench --help``. It times layers beside PyTorch, and checks what it times."""
