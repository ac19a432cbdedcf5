"""What every op needs and no op owns: dispatch, registration, launches, descriptors, facts of the device."""
