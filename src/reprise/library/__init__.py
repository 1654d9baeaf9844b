"""The server's engine in a program of one's own: chats without HTTP. Its public names are those of `import reprise`."""
