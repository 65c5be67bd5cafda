"""What the candidate's torch is set to, as seen in its own process: flags that change results without any version."""

from __future__ import annotations

from typing import Any

import torch


def torch_flags(device: str) -> dict[str, Any]:
    """Flags of this process's torch and, for an accelerator, its name and libraries. JSON values only."""
    flags: dict[str, Any] = {
        "version": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "mkldnn": torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled,
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
    }
    if device.split(":")[0] == "cuda" and torch.cuda.is_available():
        matmul = torch.backends.cuda.matmul
        flags |= {
            "device": torch.cuda.get_device_name(device),
            "capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
            "cudnn": torch.backends.cudnn.version(),
            "tf32_matmul": matmul.allow_tf32,
            "tf32_cudnn": torch.backends.cudnn.allow_tf32,
            "bf16_reduced_precision": matmul.allow_bf16_reduced_precision_reduction,
            "fp16_reduced_precision": matmul.allow_fp16_reduced_precision_reduction,
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
        }
    return flags
