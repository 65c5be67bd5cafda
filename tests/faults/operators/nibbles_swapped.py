"""A conversion that takes the high half of each byte for the even element."""

import day0check


@day0check.operator.wrap("moe.convert")
def convert(inner, packed, **kwargs):
    return inner((packed << 4) | (packed >> 4), **kwargs)
