-- fenced
-- Open evaluations, or open them again, for anyone to play.
-- KEYS: 1 state (hash), 2 evaluating (hash), 3 players (hash). ARGV: 1 token, 2 seconds until both hashes expire
-- (0: never), then id and evaluation (JSON) in turn. Answer: 1.
for i = 3, #ARGV, 2 do
  redis.call('HDEL', KEYS[3], ARGV[i] .. ':player', ARGV[i] .. ':error', ARGV[i] .. ':done')
  redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1])
  redis.call('HSETNX', KEYS[3], ARGV[i] .. ':beats', 0)
end
for i = 2, 3 do
  if ARGV[2] ~= '0' then redis.call('EXPIRE', KEYS[i], ARGV[2]) end
end
return 1
