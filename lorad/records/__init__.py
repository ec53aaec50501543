"""What lorad is about, each thing told once: a run, a version, a pool, a device, a bill."""
