"""Layer names where transformers does not take the installed kernels, as 5.23 does not take 0.17.

Its decorators then do nothing. Tests that call `kernelize` by themselves import this module before any model file: the decorators
give names as they do with kernels that transformers takes. test_idle_decorators.py has the pair as it is, in processes of its own.
"""

import transformers.utils
import transformers.utils.import_utils as import_utils

IDLE = not import_utils.is_kernels_available()
if IDLE:
    for module in (import_utils, transformers.utils):
        module.is_kernels_available = lambda *_, **__: True
