"""Why a run does not learn: figures of it, and the rules that read them."""
