"""Run SGLang's server on a CPU; its arguments are those of `sglang serve`."""

import torch

# torchvision of the package index is built for CUDA; beside a torch for CPUs its kernels do not
# load, and their names are missing when it is imported. The processes of SGLang import this too.
_names = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _names.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

if __name__ == "__main__":
    import sys

    from sglang.launch_server import run_server  # pyright: ignore[reportMissingImports]
    from sglang.srt.server_args import prepare_server_args  # pyright: ignore[reportMissingImports]

    run_server(prepare_server_args(sys.argv[1:]))
