"""The server's engine in your own program: chats without HTTP. Its public names are those of `import reprise`."""
