"""klbench: why does the same token get another logprob in prefill than in decode, and where was that born?"""

__version__ = "0.1.0"
