"""The sources of the configuration: files, the node's label and the node's files. They report changes."""
