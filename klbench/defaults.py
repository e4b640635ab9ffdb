"""How much a run measures unless it is told otherwise, in tokens.

Imports nothing: the command line's help says these numbers before anything heavy is loaded.
"""

PROMPT_TOKENS = 3000
MAX_NEW_TOKENS = 512
DEMO_PROMPT_TOKENS = 300
"""Of the demo's models, by whatever command."""
DEMO_MAX_NEW_TOKENS = 128
"""Of `klbench demo` and the start screen's demo; `run --demo` generates as many as every run."""
