"""An operators file that cannot be executed."""

import a_module_that_nobody_has  # noqa: F401
