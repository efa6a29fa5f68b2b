"""Files, formats, errors, devices and processes: what every package stands on."""
