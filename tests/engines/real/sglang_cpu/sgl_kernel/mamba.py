"""Names that SGLang imports for gated delta nets; `plain_delta.py` replaces what would call them."""

causal_conv1d_fn_cpu = causal_conv1d_update_cpu = None
