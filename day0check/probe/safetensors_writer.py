"""Writes safetensors files with the standard library and torch alone, for interpreters that have nothing else.

Format (huggingface/safetensors, README "Format"): 8 bytes little-endian header length, a JSON header
{name: {dtype, shape, data_offsets}}, the bytes of the tensors without holes. Python >= 3.9.
"""

from __future__ import annotations

import ctypes
import json
import struct
from pathlib import Path
from typing import Dict, Optional, Union

import torch

from .records import replace_bytes

DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
}


def dtype_name(dtype: torch.dtype) -> str:
    """The safetensors name of a dtype. Raises ValueError for one that the format does not have."""
    name = str(dtype).replace("torch.", "")
    if name not in DTYPES:
        raise ValueError(f"safetensors has no name for dtype {name}")
    return DTYPES[name]


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """The elements of a tensor in row-major order, little-endian as every machine torch runs on."""
    tensor = tensor.detach().cpu().contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size()) if tensor.numel() else b""


def write(
    path: Union[str, Path], tensors: Dict[str, torch.Tensor], *, metadata: Optional[Dict[str, str]] = None
) -> int:
    """Writes `tensors` to `path` by rename and returns the bytes of the file. Raises ValueError, RecordError.

    Wider elements come first, so that every tensor is aligned to its element.
    """
    header: Dict[str, object] = {"__metadata__": metadata} if metadata else {}
    parts, offset = [], 0
    for name in sorted(tensors, key=lambda n: (-tensors[n].element_size(), n)):
        data = tensor_bytes(tensors[name])
        header[name] = {
            "dtype": dtype_name(tensors[name].dtype),
            "shape": list(tensors[name].shape),
            "data_offsets": [offset, offset + len(data)],
        }
        parts.append(data)
        offset += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    replace_bytes(path, struct.pack("<Q", len(text)), text, *parts)
    return 8 + len(text) + offset
