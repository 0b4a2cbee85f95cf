"""What is raised for a config.json that cannot be honoured."""


class ConfigError(ValueError):
  """A config.json that cannot be honoured; the message names the key."""
