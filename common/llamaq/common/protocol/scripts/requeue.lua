-- Hands a job back: a worker that stops gives it up, and the next worker that looks for lost jobs takes it at once.
-- Its entry keeps its place; the attempt is raised, so that the giver can write no more.
--
-- KEYS[1] job   hash       KEYS[2] stream   job stream it was claimed from
-- ARGV[1] attempt ('' when it was claimed but not started)   ARGV[2] consumer group   ARGV[3] entry id
-- ARGV[4] idle time to pretend, ms: more than any lease                ARGV[5] consumer that holds what was handed back
-- ARGV[6] worker that hands it back because it crashes: blamed as in settle.lua; '' when it stops in order
--
-- Returns 'ok' | 'lost'

local state = redis.call('HMGET', KEYS[1], 'status', 'attempt', 'generated', 'generated_at_start')
if ARGV[1] ~= '' then
  if state[1] ~= 'running' or state[2] ~= ARGV[1] then
    if ARGV[6] == '' then
      forgive(KEYS[1], ARGV[1])
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
