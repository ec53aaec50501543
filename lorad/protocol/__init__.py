"""How drivers and the daemon talk to a pool: frames on a Unix socket, msgpack headers and raw buffers."""
