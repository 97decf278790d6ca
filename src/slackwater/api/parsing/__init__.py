"""What a model says, taken apart: reasoning, content and tool calls, by the format of its family. Pure."""
