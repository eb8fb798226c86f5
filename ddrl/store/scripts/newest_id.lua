-- Give the id of the newest entry, which may be longer than a reply may be.
-- KEYS: 1 stream. ARGV: none. Answer: the id; nil if there is none.
local entry = first_entry('XREVRANGE', KEYS[1], '+', '-')
return entry and entry[1]
