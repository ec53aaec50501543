"""The builtin trainer and engine on a GPU that computes nothing, on any CPU.

They show what a first day on a GPU would show, but for numbers and speed: tensors of two devices in one
operation, reads of the device while a graph is captured, how many reads and kernels a step has, which kernel
computes attention, and which bytes stay.
"""
