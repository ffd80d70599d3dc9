"""Where the facts are gathered. Every blocking function here may hang with what it looks at: `gathering` bounds it."""
