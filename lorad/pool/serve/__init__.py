"""Calls to a pool: frames in, one verb each, frames out."""
