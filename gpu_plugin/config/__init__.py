"""What the operator asks for: flags, environment and file become one immutable `Settings`. Pure: reads nothing itself."""
