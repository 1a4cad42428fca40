module plimsoll.dev/book

go 1.26.0
