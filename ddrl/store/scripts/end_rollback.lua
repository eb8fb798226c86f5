-- fenced
-- Delete the weights that a learner has gone back to, unless others have been named since.
-- KEYS: 1 state (hash), 2 the weights (string). ARGV: 1 token, 2 revision of the state when it went back. Answer: 1 or 0.
if tonumber(redis.call('HGET', KEYS[1], 'revision') or 0) ~= tonumber(ARGV[2]) then return 0 end
return redis.call('DEL', KEYS[2])
