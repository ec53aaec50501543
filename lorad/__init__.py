"""lorad: the control plane for LoRA reinforcement learning on shared GPU boxes."""

__version__ = "0.1.0"
