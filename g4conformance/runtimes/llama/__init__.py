"""llama.cpp, through llama-cpp-python, in an environment of its own: the foreign side of `--runtime-command`.

    PYTHON .../g4conformance/runtimes/llama [--mmproj mmproj.gguf] [--instead kv-f32] text.gguf

is the command; PYTHON is that of an environment with llama-cpp-python and safetensors, in which g4conformance, torch
and transformers need not be installed. `docs/runtimes.md` says how both files are made of a checkpoint.

- `ggml.py`: how a tensor lies in ggml's memory
- `listening.py`: what llama.cpp's eval callback hears of a pass
- `names.py`: llama.cpp's names and layouts become the contract's
- `text.py`, `pictures.py`: a prompt is run as users run one
- `instead.py`: interventions
"""
