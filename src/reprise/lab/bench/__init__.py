"""`reprise bench`: the same requests to several servers, on the user's own model and machine, and a report of them."""
