"""Pools: start them, watch them, end them, and clean up what they leave behind."""
