"""The command `lorad skill`, and the text that it prints and installs."""
