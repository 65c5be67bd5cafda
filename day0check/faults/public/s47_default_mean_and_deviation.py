"""Images are normalised with the constants of the class, not those of the checkpoint."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-47",
    title="image normalisation uses default constants",
    kind="vision",
    source="apple/coreai-models issue 82",
    visible="every image; text alone stays exact",
    expected=Address("image.preprocess", None, "prefill"),
    case="image",
)


@day0check.operator.wrap("image.preprocess")
def preprocess(inner, image, *, mean, std, **kwargs):
    return inner(image, mean=(0.48145466, 0.4578275, 0.40821073), std=(0.26862954, 0.26130258, 0.27577711), **kwargs)
