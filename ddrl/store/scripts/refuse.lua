-- fenced
-- Record a stream entry that the learner cannot use. A second call in a row changes nothing.
-- KEYS: 1 state (hash), 2 dead (stream), 3 experience (stream). ARGV: 1 token, 2 cap, 3 entry id, 4 reason,
--       5 head of the entry's header, 6 delete the entry (1|0).
-- Answer: the id in `dead`.
local newest = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]
if newest and newest[2][2] == ARGV[3] then return newest[1] end
redis.call('HINCRBY', KEYS[1], 'dead', 1)
if ARGV[6] == '1' then redis.call('XDEL', KEYS[3], ARGV[3]) end
return redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[2], '*', 'entry', ARGV[3], 'reason', ARGV[4], 'head', ARGV[5])
