"""The experiments as TOML files, and their reader."""
