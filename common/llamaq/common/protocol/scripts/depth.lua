-- Counts the jobs of one partition that wait, those that run, and those that are not due.
--
-- KEYS[1]   later    sorted set of the jobs that had no entry so far, by the time at which they are due
-- KEYS[2..] streams  job streams of the partition
-- ARGV[1]   group    consumer group of the job streams
--
-- Returns {waiting, running, delayed, mode}. Jobs that are due and have no entry yet wait. `mode` is 'paused',
-- 'draining' or 'open'.

local later = KEYS[1]
local waiting, running = redis.call('ZCOUNT', later, '-inf', now_ms()), 0
local delayed = redis.call('ZCARD', later) - waiting
for i = 2, #KEYS do
  local stream = KEYS[i]
  local n_running = count_running(stream, ARGV[1])
  waiting = waiting + redis.call('XLEN', stream) - n_running
  running = running + n_running
end
local mode = redis.pcall('HGET', string.match(later, '^(.*:)later$') .. 'config', 'mode')
return {waiting, running, delayed, type(mode) == 'string' and mode or 'open'}
