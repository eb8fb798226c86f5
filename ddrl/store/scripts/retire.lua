-- fenced
-- KEYS: state, producers, ledger. ARGV: token, stand-in, then of each producer: id, what is known of it, its row.
-- Who has appended meanwhile stays. From then on no append is taken of an id up to `retired` that is not known.
redis.call('HDEL', KEYS[3], '')
local last = tonumber(redis.call('HGET', KEYS[1], 'retired') or 0)
local row, known = {0, 0, 0}, {0, 0, 0}  -- consumed, refused, unread; steps, fragments, duplicates
local function add(sums, text, pattern)
  for i, value in ipairs({string.match(text, pattern)}) do sums[i] = sums[i] + tonumber(value) end
end
local ROW, KNOWN = '^(%d+) (%d+) (%d+) ', '^%d+ %d+ (%d+) %d+ %S+ (%d+) (%d+) '
local own, stands = redis.call('HGET', KEYS[3], ARGV[2]), redis.call('HGET', KEYS[2], ARGV[2])
own, stands = own or '0 0 0 0 -1', stands or '0 0 0 0 - 0 0 -'
if not (string.match(own, ROW) and string.match(stands, KNOWN)) then return 0 end
local num = 0
for i = 3, #ARGV, 3 do
  if redis.call('HGET', KEYS[2], ARGV[i]) == ARGV[i + 1] and redis.call('HGET', KEYS[3], ARGV[i]) == ARGV[i + 2] then
    add(row, ARGV[i + 2], ROW)
    add(known, ARGV[i + 1], KNOWN)
    redis.call('HDEL', KEYS[2], ARGV[i])
    redis.call('HDEL', KEYS[3], ARGV[i])
    last, num = math.max(last, tonumber(ARGV[i])), num + 1
  end
end
if num == 0 then return 0 end
add(row, own, ROW)
add(known, stands, KNOWN)
local function plain(value) return string.format('%.0f', value) end
redis.call('HSET', KEYS[1], 'retired', plain(last))
redis.call('HSET', KEYS[3], ARGV[2], table.concat({plain(row[1]), plain(row[2]), plain(row[3]), '0 -1'}, ' '))
redis.call('HSET', KEYS[2], ARGV[2], table.concat(
  {'0 0', plain(known[1]), '0 -', plain(known[2]), plain(known[3]), '-'}, ' '))
return num
