-- fenced
-- Delete an entry of experience that is too long for the learner to read, and record it; leave a shorter one.
-- Before it, those of more fields than an append writes are deleted without a record.
-- KEYS: 1 state (hash), 2 dead (stream), 3 experience (stream). ARGV: 1 token, 2 cap, 3 bytes of the longest reply,
--       4 id of the entry before it. Answer: the number of entries deleted.
local entry = first_entry('XRANGE', KEYS[3], '(' .. ARGV[4], '+')
if not entry then return 0 end
local bytes = 1000  -- of a reply: what stands before and after its fields, at most
for _, part in ipairs(entry[2]) do bytes = bytes + #part + #tostring(#part) + 5 end
if bytes <= tonumber(ARGV[3]) then return 0 end
redis.call('XDEL', KEYS[3], entry[1])
redis.call('HINCRBY', KEYS[1], 'dead', 1)
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[2], '*', 'entry', entry[1], 'reason', 'too long to be read', 'head', '')
return 1
