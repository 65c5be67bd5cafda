"""Pools in memory of our own: columns before pages, states column by column. Right to the byte."""

import torch

import day0check


@day0check.layout("kv")
@day0check.layout("index")
class ColumnsFirst:
    """[width, pages, page]: a page of one column lies together."""

    def allocate(self, pages, page, width, dtype, device):
        return torch.full((width, pages, page), float("nan"), dtype=dtype, device=device)

    def write(self, memory, rows, slots):
        memory[:, slots // memory.shape[2], slots % memory.shape[2]] = rows.T

    def read_logical(self, memory, slots):
        return memory[:, slots // memory.shape[2], slots % memory.shape[2]].T.contiguous()


@day0check.layout("state")
class Transposed:
    """[width, slots]."""

    def allocate(self, pages, page, width, dtype, device):
        return torch.full((width, pages * page), float("nan"), dtype=dtype, device=device)

    def write(self, memory, rows, slots):
        memory[:, slots] = rows.T

    def read_logical(self, memory, slots):
        return memory[:, slots].T
