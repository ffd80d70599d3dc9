"""Where configuration comes from, and how one hears that it changed."""
