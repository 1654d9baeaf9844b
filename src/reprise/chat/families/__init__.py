"""What the chat templates of the most used families teach, each as the file that `reprise inspect --learnt` prints."""
