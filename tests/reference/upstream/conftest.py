import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True, scope="session")
def upstream():
    """These comparisons are against one version of transformers, without torchvision (its wheels replace torch)."""
    transformers = pytest.importorskip("transformers", reason="these comparisons need the extra `test`")
    from crosscheck import UPSTREAM_VERSION

    if transformers.__version__ != UPSTREAM_VERSION:
        pytest.skip(f"transformers {transformers.__version__} is not {UPSTREAM_VERSION}")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers
