-- Read the newest entries of a stream that workers may write, and no more of them than fits; see also `shrink`.
-- KEYS: 1 stream. ARGV: 1 id before them, 2 largest id, 3 to 5 bounds as of `newest`.
-- Answer: id of the newest, or of the next if that is smaller than ARGV[1], so that a reader who followed a later one
--         sees what comes after lower_ids.lua; "" if there is nothing new; entries, the newest first.
shrink(KEYS[1])
local most_parts, most_bytes, longest = bound(ARGV[3], 300000), bound(ARGV[4], 2 ^ 25), bound(ARGV[5], 2 ^ 19)
local found, last = newest(KEYS[1], '(' .. ARGV[1], ARGV[2], most_parts, most_bytes, longest)
local after_ms, after_number = string.match(ARGV[1], '(%d+)-(%d+)')
local time = redis.call('TIME')
if last == '' and tonumber(after_ms) >= time[1] * 1000 + math.floor(time[2] / 1000) then  -- else new ids are larger
  local given, refused = next_id(KEYS[1])
  if not given then given = refused and ARGV[1] or '0-0' end
  local ms, number = string.match(given, '(%d+)-(%d+)')
  local by = tonumber(ms) - tonumber(after_ms)
  if by < 0 or by == 0 and tonumber(number) < tonumber(after_number) then last = given end
end
return {last, found}
