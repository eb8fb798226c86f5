-- fenced
-- Add rows to the run's history.
-- KEYS: 1 state (hash), 2 history (stream). ARGV: 1 token, 2 cap, then table and row (JSON) in turn. Answer: none.
for i = 3, #ARGV, 2 do
  add_capped(KEYS[2], ARGV[2], 'table', ARGV[i], 'row', ARGV[i + 1])
end
