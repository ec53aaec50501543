"""An engine over transformers: slow, and right for every architecture that the FSDP trainer opens."""
