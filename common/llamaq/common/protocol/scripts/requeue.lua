-- Requeues a job that its worker will not run to its end. The next worker that reclaims jobs claims it at once.
-- The entry keeps its place in the stream. The attempt number rises, so that the old worker can no longer write.
--
-- KEYS[1]  job       hash of the job
-- KEYS[2]  stream    job stream that the job was claimed from
-- ARGV[1]  attempt   number of the worker's attempt; '': the job was claimed and not started
-- ARGV[2]  group     consumer group of the job stream
-- ARGV[3]  entry     id of the job's entry
-- ARGV[4]  idle_ms   idle time to set on the entry, longer than any lease
-- ARGV[5]  consumer  consumer that owns requeued entries
-- ARGV[6]  crashed   id of the worker if it crashed; the death counts as in check_crash.lua. '': it did not crash
--
-- Returns 'ok'    the job is requeued
--         'lost'  a newer attempt exists, or the job has ended

local state = redis.call('HMGET', KEYS[1], 'status', 'attempt', 'generated', 'generated_at_start')
if ARGV[1] ~= '' then
  if state[1] ~= 'running' or state[2] ~= ARGV[1] then
    if ARGV[6] == '' then
      remove_death(KEYS[1], ARGV[1])
    end
    return 'lost'
  end
  if ARGV[6] ~= '' and state[3] == state[4] then
    add_death(KEYS[1], ARGV[1], ARGV[6])
  end
  redis.call('HINCRBY', KEYS[1], 'attempt', 1)
  redis.call('HSET', KEYS[1], 'status', 'queued')
end
redis.call('XCLAIM', KEYS[2], ARGV[2], ARGV[5], 0, ARGV[3], 'IDLE', ARGV[4], 'JUSTID')
return 'ok'
