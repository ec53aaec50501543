"""All that can be done in the interface, in one table: keys, footer, help, palette and line come from it."""
