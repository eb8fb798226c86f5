-- Read the newest entries of a stream that workers may write, and no more of them than fits.
-- KEYS: 1 stream. ARGV: 1 id before them, 2 largest id, 3 to 5 bounds as of `newest`.
-- Answer: id of the newest, "" if there is none; entries, the newest first.
local found, last = newest(KEYS[1], '(' .. ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5]))
return {last, found}
