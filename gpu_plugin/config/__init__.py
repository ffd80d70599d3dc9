"""The operator's configuration: flags, environment and file become one immutable `Settings`. Pure: no I/O."""
