# What `reprise.deploy` uses of Ray.
