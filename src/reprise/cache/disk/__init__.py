"""The disk tier of the prefix cache: records of bytes in a bounded directory, addressed by what they depend on."""
